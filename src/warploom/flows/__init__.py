"""What joins the floors: whole jobs from a user's input to files a user can check and deploy."""
