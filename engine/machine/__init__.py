"""What this machine has and reaches."""
