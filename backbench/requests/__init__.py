"""What can be asked of backbench: a request is one frozen value a verb.

The command line parses into it (`parsing.parse`), a grid expands into it, Python makes it, and Slurm
carries it as the words that it writes itself (`Request.argv`). `parse(request.argv())` is `request`.

options     how a field of a request becomes an option; `Request`, `Outcome`
parsing     the parser of the command line, and `parse`
every       all requests, in the order of --help
places      fields that several requests share: where data and runs are, which processes
the others  the requests themselves, a file a verb or family of verbs
"""
