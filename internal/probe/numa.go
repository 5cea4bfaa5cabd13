//go:build linux

package probe

import (
	"os"
	"path/filepath"
	"strings"
)

// balancesNUMA tells whether the kernel moves memory between nodes, so that its
// faults are counted by node: kernel.numa_balancing is on, and there is more
// than one node. Where it cannot be read, it does not.
func balancesNUMA(root string) bool {
	on, err := os.ReadFile(filepath.Join(root, "proc/sys/kernel/numa_balancing"))
	if err != nil || strings.TrimSpace(string(on)) == "0" {
		return false
	}
	nodes, err := os.ReadFile(filepath.Join(root, "sys/devices/system/node/online"))
	if err != nil {
		return false
	}
	list, err := parseCPUs(strings.TrimSpace(string(nodes))) // nodes are listed in the same way
	return err == nil && len(list) > 1
}
