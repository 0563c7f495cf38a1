"""Parts of the page, one file each, in page order."""
