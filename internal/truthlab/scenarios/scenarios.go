// Package scenarios holds the truth lab's cases: each file a group, each scenario
// data and one small fault function. To add one, append it to its group's list.
package scenarios

import (
	"slices"

	"github.com/ebpfllm/ebpfllm/internal/truthlab/lab"
)

// All are the scenarios, in the order of the table.
func All() []lab.Scenario {
	return slices.Concat(host(), network(), serverShapes(), field())
}
