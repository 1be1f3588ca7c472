"""What goes over the wire: one msgspec struct per JSON object."""
