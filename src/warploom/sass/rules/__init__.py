"""What makes machine code legal, and the verifier of an edit."""
