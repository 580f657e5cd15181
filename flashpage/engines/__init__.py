"""Adapters to other projects' engines, one folder each; plugin/ is shared by vLLM's and SGLang's."""
