"""Any function that trains, as a patient: watched and changed from within its own process."""
