"""Every place where this plugin wraps, replaces or assigns into vLLM and its libraries; nothing else does.

``inventory`` lists what is changed, why, which contract test holds it and when it goes. ``wire`` names what travels
through vLLM's objects.
"""
