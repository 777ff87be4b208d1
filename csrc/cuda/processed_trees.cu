// Trees whose target rows processors change.
#define SPECDEC_PROCESSED
#include "cuda/verify_tree.cu"
