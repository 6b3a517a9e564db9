"""Commands of `deepspeed-nmt`, one file each: their arguments, and what they print."""
