//go:build linux

package probe

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf/btf"
)

// preemptCountAt returns how far a CPU's preempt count lies from its run queue,
// in bytes. Both are static per-CPU variables, whose distances are the same on
// every CPU, and the run queue is what a program can reach: from the task that
// runs. (Their addresses are in no symbol table of a kernel without
// CONFIG_KALLSYMS_ALL.) The count tells whether a wake-up is the thread's own or
// an interrupt's, and whether bytes come by a softirq; without it no wake-up chain
// is followed, and no delay of a softirq known.
//
// The count is the variable __preempt_count, from 6.2 to 6.14 a part of pcpu_hot.
func preemptCountAt(kernel *btf.Spec) (int64, error) {
	var task *btf.Struct
	if err := kernel.TypeByName("task_struct", &task); err != nil {
		return 0, fmt.Errorf("find task_struct in the kernel's type information: %w", err)
	}
	if _, ok := memberAt(task, "softirq_disable_cnt"); ok {
		return 0, errors.New("a PREEMPT_RT kernel does not keep soft interrupts in the preempt count")
	}
	var section *btf.Datasec
	if err := kernel.TypeByName(".data..percpu", &section); err != nil {
		return 0, fmt.Errorf("the kernel's type information has no per-CPU variables (built without pahole 1.17 or later?): %w", err)
	}
	queue, count := int64(-1), int64(-1)
	for _, info := range section.Vars {
		v, ok := info.Type.(*btf.Var)
		if !ok {
			continue
		}
		switch v.Name {
		case "runqueues":
			queue = int64(info.Offset)
		case "__preempt_count":
			count = int64(info.Offset)
		case "pcpu_hot":
			if at, ok := memberAt(btf.UnderlyingType(v.Type), "preempt_count"); ok {
				count = int64(info.Offset) + int64(at)
			}
		}
	}
	if queue < 0 || count < 0 {
		return 0, errors.New("the kernel's type information does not say where the preempt count is kept")
	}
	return count - queue, nil
}

// memberAt returns the offset in bytes of a member of a struct or union, or of
// one within it that has no name.
func memberAt(t btf.Type, name string) (uint32, bool) {
	var members []btf.Member
	switch t := t.(type) {
	case *btf.Struct:
		members = t.Members
	case *btf.Union:
		members = t.Members
	}
	for _, m := range members {
		if m.Name == name {
			return m.Offset.Bytes(), true
		}
		if m.Name != "" {
			continue
		}
		if at, ok := memberAt(btf.UnderlyingType(m.Type), name); ok {
			return m.Offset.Bytes() + at, true
		}
	}
	return 0, false
}
