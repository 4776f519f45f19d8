"""One file a kind of recurrent layer."""
