"""What ran where and when: recorded, counted, saved and drawn."""
