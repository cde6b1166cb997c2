"""How much shared memory a program may use, by GPU: what decides most tile sizes."""

# 227 KiB on Hopper and data-centre Blackwell, 163 KiB on A100, 99 KiB on Ada, consumer Ampere and consumer Blackwell.
SMALL, MEDIUM, LARGE = "small", "medium", "large"
# By compute capability; whatever is not here has the least.
MEMORY = {80: MEDIUM, 87: MEDIUM, 90: LARGE, 100: LARGE, 103: LARGE}
