"""A few prompts of each family, from the test split, for a first look that needs no extra package."""

EXAMPLES = {
    "math": "Liam brings 14 plums to the market. First, Liam throws away 8 bad plums. Later, Liam buys 6 plums from a friend. After "
    "that, Liam packs the plums into 2 equal crates and keeps one crate. How many plums does Liam have at the end?",
    "code": "Write a Python function `shape_phrase(phrase)` that keeps the words at most 5 letters long, puts each word with a "
    'capital letter, and joins them with "/". Trace it for "lamp stone river winter ship".',
    "text": "Write a letter from Greta the rabbit to Rosa the mouse. Greta is at the market. Mention the umbrella and then the map. "
    'Add a "P.S." about a basket.',
}
