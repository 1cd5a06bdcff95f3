"""What the algorithms of this package share."""
