"""What the processes of a job tell one another, and how all come to one answer in time."""
