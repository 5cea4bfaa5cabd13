// Package bpf holds the kernel side of the receiver: the C sources beside this
// file and what they compile to, committed so that building the project needs
// no C compiler.
//
// internal/probe loads it; nothing else should need to.
package bpf

//go:generate go tool bpf2go -go-package bpf -cc clang-19 -strip llvm-strip-19 -target amd64 -cflags "-O2 -g -Wall -Werror -mcpu=v3" -type record_kind -type head_record -type progress_record -type occurrence_record -type close_record -type retransmit_record -type retransmit_flags -type process_record -type head_flags -type progress_flags -type occurrence_flags -type close_flags -type process_flags -type counter -type stage -type process -type port_key Kernel ebpfllm.bpf.c
