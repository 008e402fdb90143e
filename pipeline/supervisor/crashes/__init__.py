"""What a dead process leaves, and which requests its death is blamed on."""
