"""What a model writes in a conversation, besides text: its reasoning, and calls of tools.

`formats` has one definition of each family's form. The parser (`parser`) and the grammar that enforces the form
(`grammar`) are both made of it, so that they cannot disagree.
"""
