"""Chat templates and token sequences: text becomes ids here, once and exactly."""
