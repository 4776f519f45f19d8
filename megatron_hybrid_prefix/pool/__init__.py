"""Memory of the recurrent states (`device`) and accounting of its slots (`slots`, without torch)."""
