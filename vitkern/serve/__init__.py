"""`vitkern serve`: predictions and embeddings over HTTP.

    uploads    a request's body: how many bytes, which part of a form, which picture
    batching   the queue and the one thread that drives the engine, a batch at a time
    forwards   what a batch asks of the model
    app        addresses, errors and their schemas, the page
    server     sockets, signals, a stop that answers what was accepted
    on_ray     the same app in replicas on a Ray cluster

A request passes them in this order. Nothing of a request names a file or an address to fetch.
"""
