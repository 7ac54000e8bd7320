"""What does not hold of a JSON object that comes from elsewhere, said in a line; pydantic holds it against a form."""


def first_problem(error):
    """(place: its names and indices, words) of the first thing that a pydantic ValidationError found."""
    found = error.errors(include_url=False, include_input=False)[0]
    return found["loc"], found["msg"]
