// Chains whose target rows processors change.
#define SPECDEC_PROCESSED
#include "cuda/verify_chain_overlap.cu"
#include "cuda/verify_chain_walk.cu"
