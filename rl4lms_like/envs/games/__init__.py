"""Text games and tasks: the environments with an id in `ENVIRONMENTS`, besides tools and adapters.

base            TextGame      spaces, the sample and the random numbers that all of them share
guess_number    GuessNumber   a number to guess
calculator      Calculator    a sum, and a calculator
word_game       WordGame      a word to guess, letter by letter
shop            Shop          a shop, whose seller the model is
"""
