"""Training functions as patients: watched and changed from inside their process."""
