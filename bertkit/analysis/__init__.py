"""What runs and studies show."""
