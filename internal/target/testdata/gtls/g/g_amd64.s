#include "textflag.h"

TEXT ·Current(SB), NOSPLIT, $0-8
	MOVQ (TLS), AX
	MOVQ AX, ret+0(FP)
	RET

TEXT ·At(SB), NOSPLIT, $0-16
	MOVQ offset+0(FP), AX
	BYTE $0x64 // FS:
	MOVQ (AX), AX
	MOVQ AX, ret+8(FP)
	RET
