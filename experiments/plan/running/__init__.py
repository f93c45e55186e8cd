"""What is planned and then run on this machine, over processes: times, and bytes that are counted."""
