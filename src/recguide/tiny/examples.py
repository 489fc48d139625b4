"""A few prompts of each family, from the test split, for a first look that needs no extra package."""

EXAMPLES = {
    "math": "Iris bakes 51 buns in the morning. First, Jonas brings 4 buns. Next, Iris sells 17 buns. Then Iris bakes 29 more buns. "
    "After that, Jonas eats 8 of the buns. How many buns are left in the bakery?",
    "code": 'Define `work_out_line(line)` in Python: it puts each word at most 4 letters long with "!" at the end, leaves any other '
    'word, and joins them with "_". Explain the result for "moon winter tiger apple".',
    "text": "Tell me a tale of exactly 6 sentences. It is about the mouse Vera and the mountain. Use the words violin, rope and key. "
    "Put a title in <<double angle brackets>> on top.",
}
