//go:build linux

package probe

import (
	"testing"

	"github.com/cilium/ebpf/btf"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestThePreemptCountIsFoundByItsDistanceFromTheRunQueue(t *testing.T) {
	integer := &btf.Int{Name: "int", Size: 4, Encoding: btf.Signed}
	task := &btf.Struct{Name: "task_struct", Size: 4, Members: []btf.Member{{Name: "pid", Type: integer}}}
	realtime := &btf.Struct{Name: "task_struct", Size: 4, Members: []btf.Member{{Name: "softirq_disable_cnt", Type: integer}}}
	// as in 6.2 to 6.14: a union without a name, in it a struct without one
	inner := &btf.Struct{Size: 12, Members: []btf.Member{{Name: "current_task", Type: integer}, {Name: "preempt_count", Type: integer, Offset: 64}}}
	hot := &btf.Struct{Name: "pcpu_hot", Size: 64, Members: []btf.Member{{Type: &btf.Union{Size: 12, Members: []btf.Member{{Type: inner}}}}}}
	variable := func(name string, of btf.Type) *btf.Var { return &btf.Var{Name: name, Type: of, Linkage: btf.GlobalVar} }
	queues, count := variable("runqueues", integer), variable("__preempt_count", integer)

	for _, c := range []struct {
		name    string
		task    *btf.Struct
		vars    []*btf.Var // each 1000 bytes after the one before
		want    int64
		problem string
	}{
		{name: "before the queue", task: task, vars: []*btf.Var{count, variable("other", integer), queues}, want: -2000},
		{name: "after it", task: task, vars: []*btf.Var{queues, count}, want: 1000},
		{name: "in pcpu_hot", task: task, vars: []*btf.Var{queues, variable("pcpu_hot", hot)}, want: 1008},
		{name: "PREEMPT_RT", task: realtime, vars: []*btf.Var{queues, count}, problem: "PREEMPT_RT"},
		{name: "no count", task: task, vars: []*btf.Var{queues}, problem: "where the preempt count is kept"},
		{name: "no per-CPU variables", task: task, problem: "no per-CPU variables"},
	} {
		t.Run(c.name, func(t *testing.T) {
			types := []btf.Type{c.task}
			if c.vars != nil {
				section := &btf.Datasec{Name: ".data..percpu"}
				for i, v := range c.vars {
					section.Vars = append(section.Vars, btf.VarSecinfo{Type: v, Offset: uint32(1000 * i), Size: 4})
				}
				types = append(types, section)
			}
			b, err := btf.NewBuilder(types, nil)
			require.NoError(t, err)
			spec, err := b.Spec()
			require.NoError(t, err)
			at, err := preemptCountAt(spec)
			if c.problem != "" {
				require.ErrorContains(t, err, c.problem)
				return
			}
			require.NoError(t, err)
			assert.Equal(t, c.want, at)
		})
	}
}
