"""Ask models that were trained: how well do they predict held-out rows, and what do they answer?"""
