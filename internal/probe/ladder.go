//go:build linux

package probe

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
)

// choice is what the running kernel allows of a hook.
type choice struct {
	way     *way    // nil if there is none
	refused []error // why the ways before it are not to be had
	err     error   // why there is none
}

// choose takes the first way of the hook that the kernel has with the arguments that its program takes, whose
// program calls nothing that the kernel lacks, and that a trial succeeds with: what the kernel's type information
// names may still be refused by its configuration or by whoever confines us. The last way needs no trial, since
// there is nothing to step down to.
func (h *hook) choose(kernel *btf.Spec, programs map[string]*ebpf.ProgramSpec, trial func(*way) error) choice {
	var c choice
	for i := range h.ways {
		w := &h.ways[i]
		err := w.missing(kernel)
		if err == nil {
			err = lacksHelper(kernel, programs[w.program])
		}
		if err == nil && i < len(h.ways)-1 {
			err = trial(w)
		}
		if err == nil {
			c.way, c.err = w, nil
			return c
		}
		err = fmt.Errorf("%s: %w", w, err)
		c.refused = append(c.refused, err)
		if c.err == nil {
			c.err = err
		} else {
			c.err = fmt.Errorf("%w; %w", c.err, err)
		}
	}
	return c
}

// unneeded tells whether the kernel does what the hook looks at by other functions.
func (h *hook) unneeded(kernel *btf.Spec) bool {
	return h.gone && !slices.ContainsFunc(h.ways, func(w way) bool {
		var f *btf.Func
		return kernel.TypeByName(w.target, &f) == nil
	})
}

// missing returns why the kernel does not have it, or nil.
func (w *way) missing(kernel *btf.Spec) error {
	var have []btf.FuncParam
	switch w.kind {
	case event:
		return nil
	case tracepoint:
		var t *btf.Typedef
		if err := kernel.TypeByName("btf_trace_"+w.target, &t); err != nil {
			return fmt.Errorf("this kernel has no such tracepoint (needs Linux %s)", w.since)
		}
		p, _ := t.Type.(*btf.Pointer)
		if p == nil {
			return errors.New("this kernel's type information says nothing of its arguments")
		}
		f, _ := p.Target.(*btf.FuncProto)
		if f == nil || len(f.Params) == 0 {
			return errors.New("this kernel's type information says nothing of its arguments")
		}
		have = f.Params[1:] // the first is the tracepoint's own
	default:
		var t *btf.Func
		if err := kernel.TypeByName(w.target, &t); err != nil {
			return errors.New("this kernel has no such function")
		}
		f, _ := t.Type.(*btf.FuncProto)
		if f == nil {
			return errors.New("this kernel's type information says nothing of its arguments")
		}
		have = f.Params
	}
	names := make([]string, 0, len(have))
	for _, p := range have {
		names = append(names, typeName(p.Type))
	}
	got := strings.Join(names, ", ")
	if w.kind != exit && w.args == "" || got == w.args || w.kind != exit && strings.HasPrefix(got, w.args+", ") {
		return nil
	}
	return fmt.Errorf("on this kernel its arguments are (%s) and not (%s)", got, w.args)
}

// typeName is a type as it is written in C, without const, struct and the like.
func typeName(t btf.Type) string {
	switch t := t.(type) {
	case *btf.Pointer:
		return typeName(t.Target) + "*"
	case *btf.Const:
		return typeName(t.Type)
	case *btf.Void:
		return "void"
	}
	return t.TypeName()
}

// lacksHelper returns which of the kernel's functions for programs this kernel does not have, though the program calls
// it; nil if there is none, or the kernel does not tell.
func lacksHelper(kernel *btf.Spec, program *ebpf.ProgramSpec) error {
	var helpers *btf.Enum
	if kernel.TypeByName("bpf_func_id", &helpers) != nil || program == nil {
		return nil
	}
	for _, i := range program.Instructions {
		if i.IsBuiltinCall() && !slices.ContainsFunc(helpers.Values, func(v btf.EnumValue) bool { return v.Value == uint64(i.Constant) }) {
			return fmt.Errorf("this kernel lacks the helper %s, which programs need (Linux 5.17 has all that are used)", asm.BuiltinFunc(i.Constant))
		}
	}
	return nil
}

// try attaches a program that does nothing, and detaches it at once.
func try(w *way) error {
	p, err := ebpf.NewProgramWithOptions(&ebpf.ProgramSpec{
		Name:         "trial",
		Type:         ebpf.Tracing,
		AttachType:   [...]ebpf.AttachType{tracepoint: ebpf.AttachTraceRawTp, entry: ebpf.AttachTraceFEntry, exit: ebpf.AttachTraceFExit}[w.kind],
		AttachTo:     w.target,
		License:      "Dual MIT/GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()},
	}, ebpf.ProgramOptions{LogDisabled: true})
	if err != nil {
		return fmt.Errorf("this kernel does not let it be used: %w", err)
	}
	defer p.Close()
	detach, err := w.attach(p)
	if err != nil {
		return fmt.Errorf("this kernel does not let it be used: %w", err)
	}
	return detach()
}
