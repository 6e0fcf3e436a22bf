"""Chat templates in the manner of models that see, and conversations for them."""

from typing import Any

CAPITALS = """<bos>{% for message in messages %}{{ message['role'] | capitalize }}\
{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}\
{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}\
{% elif part['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>
{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""

IMAGES_FIRST = """{% for message in messages %}{{ message['role'] | upper }}: \
{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}{% endfor %}\
{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }} {% endfor %}\
{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""

EITHER = """{% for message in messages %}<{{ message.role }}>{% if message.content is string %}{{ message.content }}\
{% else %}{% for part in message.content %}{% if part.type == 'image' or 'image' in part %}{{ '<image>' }}\
{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}</{{ message.role }}>{% endfor %}{{ '<assistant>' }}"""

BLIND = """{% for message in messages %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endfor %}"""

TEMPLATES = {"capitals": CAPITALS, "images first": IMAGES_FIRST, "either": EITHER}

IMAGE = {"type": "image"}
Messages = list[dict[str, Any]]


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def turn(*parts: dict[str, str], role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(parts)}


CONVERSATIONS: dict[str, Messages] = {
    "image": [turn(IMAGE)],
    "image, text": [turn(IMAGE, text("the cat?"))],
    "between": [turn(text("the cat "), IMAGE, text(" sat on"), IMAGE, text(""))],
    "turns": [
        turn(text("that"), role="system"),
        turn(IMAGE, text("the cat?")),
        turn(text("the mat"), role="assistant"),
        turn(text("the rat?")),
        turn(text("hat"), text("s"), role="assistant"),
        turn(text("<b> {{ 1 }}\n"), IMAGE),
    ],
    "no image": [turn(text("the cat")), turn(text("sat"), role="assistant"), turn(text("on"))],
}
