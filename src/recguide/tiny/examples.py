"""A few prompts of each family, from the test split, for a first look that needs no extra package."""

EXAMPLES = {
    "math": "Iris has 29 hens on the farm. First, after a good year there are 2 times as many hens. Next, Iris splits the hens into 2 "
    "equal herds and keeps one herd. Then Iris sells 2 hens to Omar. How many hens live on the farm now?",
    "code": "Write a Python function `shape_phrase(phrase)` that keeps the words at most 5 letters long, puts each word with a "
    'capital letter, and joins them with "/". Trace it for "lamp stone river winter ship".',
    "text": "Describe a key for sale at the island in 6 sentences. The text must include a fox and a basket. Separate the 3 "
    "paragraphs with ***.",
}
