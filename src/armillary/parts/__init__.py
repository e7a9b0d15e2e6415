"""The layers' parts, in torch; each file stands alone and knows no files and no command line."""
