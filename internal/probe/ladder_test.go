//go:build linux

package probe

import (
	"bytes"
	"errors"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func pointer(name string) btf.Type {
	return &btf.Pointer{Target: &btf.Const{Type: &btf.Struct{Name: name}}}
}

func proto(args ...btf.Type) *btf.FuncProto {
	p := &btf.FuncProto{Return: (*btf.Void)(nil)}
	for _, a := range args {
		p.Params = append(p.Params, btf.FuncParam{Name: "x", Type: a})
	}
	return p
}

// a kernel with these tracepoints, functions and helpers
func kernelWith(t *testing.T, tracepoints, functions map[string]*btf.FuncProto, helpers ...asm.BuiltinFunc) *btf.Spec {
	t.Helper()
	b, err := btf.NewBuilder(nil, nil)
	require.NoError(t, err)
	for name, p := range tracepoints {
		whole := &btf.FuncProto{Return: p.Return, Params: append([]btf.FuncParam{{Name: "data", Type: &btf.Pointer{Target: (*btf.Void)(nil)}}}, p.Params...)}
		_, err := b.Add(&btf.Typedef{Name: "btf_trace_" + name, Type: &btf.Pointer{Target: whole}})
		require.NoError(t, err)
	}
	for name, p := range functions {
		_, err := b.Add(&btf.Func{Name: name, Type: p, Linkage: btf.StaticFunc})
		require.NoError(t, err)
	}
	enum := &btf.Enum{Name: "bpf_func_id", Size: 4}
	for _, h := range helpers {
		enum.Values = append(enum.Values, btf.EnumValue{Name: h.String(), Value: uint64(h)})
	}
	_, err = b.Add(enum)
	require.NoError(t, err)
	raw, err := b.Marshal(nil, nil)
	require.NoError(t, err)
	spec, err := btf.LoadSpecFromReader(bytes.NewReader(raw))
	require.NoError(t, err)
	return spec
}

func TestTheFirstWayIsTakenThatTheKernelAllows(t *testing.T) {
	number := &btf.Int{Name: "int", Size: 4, Encoding: btf.Signed}
	sock, msg := pointer("sock"), pointer("msghdr")
	h := &hook{name: "read", ways: []way{
		{tracepoint, "at", "read_length", "sock*, int", 0, "6.3"},
		{exit, "left", "read", "sock*, msghdr*", 0, "5.14"},
		{exit, "left_old", "read", "sock*, int, msghdr*", 0, "5.14"},
	}}
	programs := map[string]*ebpf.ProgramSpec{
		"at":       {Instructions: asm.Instructions{asm.FnLoop.Call()}},
		"left":     {Instructions: asm.Instructions{asm.FnKtimeGetNs.Call()}},
		"left_old": {},
	}
	type points = map[string]*btf.FuncProto
	all := []asm.BuiltinFunc{asm.FnLoop, asm.FnKtimeGetNs}
	refused := errors.New("operation not permitted")
	tests := []struct {
		name                   string
		tracepoints, functions points
		helpers                []asm.BuiltinFunc
		refuse                 string // program whose trial fails
		want                   string
		reasons                []string
	}{
		{name: "the tracepoint", tracepoints: points{"read_length": proto(sock, number)}, functions: points{"read": proto(sock, msg)}, helpers: all, want: "at"},
		{name: "more arguments than are taken", tracepoints: points{"read_length": proto(sock, number, msg)}, helpers: all, want: "at"},
		{name: "a kernel without the tracepoint", functions: points{"read": proto(sock, msg)}, helpers: all, want: "left", reasons: []string{"tp_btf/read_length: this kernel has no such tracepoint (needs Linux 6.3)"}},
		{
			name: "a tracepoint with other arguments", tracepoints: points{"read_length": proto(number, sock)}, functions: points{"read": proto(sock, msg)}, helpers: all, want: "left",
			reasons: []string{"tp_btf/read_length: on this kernel its arguments are (int, sock*) and not (sock*, int)"},
		},
		{
			name: "what it returns stands behind all arguments", functions: points{"read": proto(sock, number, msg)}, helpers: all, want: "left_old",
			reasons: []string{"no such tracepoint", "fexit/read: on this kernel its arguments are (sock*, int, msghdr*) and not (sock*, msghdr*)"},
		},
		{
			name: "a helper that is missing", tracepoints: points{"read_length": proto(sock, number)}, functions: points{"read": proto(sock, msg)}, helpers: all[1:], want: "left",
			reasons: []string{"tp_btf/read_length: this kernel lacks the helper FnLoop"},
		},
		{
			name: "a trial that fails", tracepoints: points{"read_length": proto(sock, number)}, functions: points{"read": proto(sock, msg)}, helpers: all, refuse: "at", want: "left",
			reasons: []string{"tp_btf/read_length: operation not permitted"},
		},
		{
			name: "the last way is not tried", functions: points{"read": proto(sock, number, msg)}, helpers: all, refuse: "left_old", want: "left_old",
			reasons: []string{"no such tracepoint", "its arguments are"},
		},
		{
			name: "no way at all", functions: points{"read": proto(sock, msg)}, helpers: all, refuse: "left",
			reasons: []string{"no such tracepoint", "fexit/read: operation not permitted", "its arguments are"},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := h.choose(kernelWith(t, tt.tracepoints, tt.functions, tt.helpers...), programs, func(w *way) error {
				if w.program == tt.refuse {
					return refused
				}
				return nil
			})
			require.Len(t, c.refused, len(tt.reasons))
			for i, r := range tt.reasons {
				assert.ErrorContains(t, c.refused[i], r)
			}
			if tt.want != "" {
				require.NoError(t, c.err)
				assert.Equal(t, tt.want, c.way.program)
				return
			}
			assert.Nil(t, c.way)
			require.ErrorIs(t, c.err, refused)
			for _, r := range tt.reasons {
				assert.ErrorContains(t, c.err, r)
			}
		})
	}
}

func TestAHookOnAFunctionThatIsGoneIsNotNeeded(t *testing.T) {
	h := &hook{gone: true, ways: []way{{entry, "p", "sendpage", "sock*", 0, ""}}}
	assert.True(t, h.unneeded(kernelWith(t, nil, nil)))
	assert.False(t, h.unneeded(kernelWith(t, nil, map[string]*btf.FuncProto{"sendpage": proto(pointer("sock"))})))
	h.gone = false
	assert.False(t, h.unneeded(kernelWith(t, nil, nil)))
}

func TestAKernelBelowTheFloorIsTooOld(t *testing.T) {
	for release, old := range map[string]bool{
		"4.18.0-553.el8_10.x86_64": true, "5.10.0-32-cloud-amd64": true, "5.13.19": true,
		"5.14.0-427.13.1.el9_4.x86_64": false, "6.1.0-57-cloud-amd64": false, "7.3.4+deb13-cloud-amd64": false, "next": false,
	} {
		if err := tooOld(release); old {
			assert.ErrorContains(t, err, release+" is too old")
			assert.ErrorContains(t, err, "5.14")
		} else {
			assert.NoError(t, err)
		}
	}
}
