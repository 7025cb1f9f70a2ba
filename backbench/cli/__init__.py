"""The command line `backbench VERB ...`.

program  one command, from its words to its exit status
verbs    which function does which verb, and what is refused before torch is imported
the others are the verbs that belong to none of the three programs, a file each

What each verb takes stands in backbench/requests.
"""
