"""How much shared memory a program may use, by GPU: what decides most tile sizes."""

SMALL, MEDIUM, LARGE = "small", "medium", "large"
# Ada, consumer Ampere and consumer Blackwell; A100; Hopper and data-centre Blackwell.
KIBIBYTES = {SMALL: 99, MEDIUM: 163, LARGE: 227}
# By compute capability; whatever is not here has the least.
MEMORY = {80: MEDIUM, 87: MEDIUM, 90: LARGE, 100: LARGE, 103: LARGE}
