"""What runs leave about themselves: time by phase, tokens, rows, in whole numbers that add up"""
