"""What people see: charts, pictures, traces."""
