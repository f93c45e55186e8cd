"""The rows of workers, walked with what their stages hold, and with the messages between workers."""
