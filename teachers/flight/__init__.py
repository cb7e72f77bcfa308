"""Teachers in another process or cluster, over Arrow Flight: `server.PoolServer` there, `client.FlightPool` here.

    action  hello               → JSON: versions, payload, dtype, vocabulary, each domain's teachers with weight, digest, head
    get     a head's hash       → the matrix in slices; the client hashes it again
    exchange a step's rollouts  → the workers' Arrow streams, byte for byte, in slices; then JSON: sizes

Only JSON and Arrow travel; nothing is pickled. Asking twice for the same rollouts gives the same rows in the same parts,
so the client may ask again after a broken connection.
"""
