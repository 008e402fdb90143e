"""Programs in torch: the reference for the other back ends."""
