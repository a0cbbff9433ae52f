/* A program that somebody else could have written: it updates one parameter with the fused AdamW.
 * SPDX-License-Identifier: Apache-2.0 */
#include <gemini_update.h>
#include <stdio.h>

int main(void) {
  gemini_adamw_t adamw = GEMINI_ADAMW_INIT;
  float grad = 1, master = 1, momentum = 0, variance = 0;
  adamw.grad_dtype = GEMINI_DTYPE_F32;
  adamw.lr = 0.5;
  adamw.weight_decay = 0;
  if (gemini_adamw_host(&adamw, 1, NULL, &grad, &master, &momentum, &variance, NULL) != GEMINI_OK) {
    gemini_error_info_t info = GEMINI_ERROR_INFO_INIT;
    if (gemini_last_error(&info) == GEMINI_OK) fprintf(stderr, "%s: %s\n", info.operation, info.message);
    return 1;
  }
  printf("%.4f\n", (double)master); /* the first step is lr against the gradient's sign */
  return 0;
}
