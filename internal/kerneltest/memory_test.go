//go:build linux

package kerneltest

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ebpfllm/ebpfllm/internal/assemble"
	"github.com/ebpfllm/ebpfllm/internal/probe"
	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// cgroup makes a group of a controller, to which the test moves the server: of
// version 2, whose files have other names, where the machine has no other.
func cgroup(t *testing.T, controller string, s *server) (path string, v2 bool) {
	t.Helper()
	path = "/sys/fs/cgroup/" + controller + "/ebpfllm-kerneltest"
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.subtree_control"); err == nil {
		path, v2 = "/sys/fs/cgroup/ebpfllm-kerneltest", true
	}
	if err := os.Mkdir(path, 0o755); err != nil {
		t.Skipf("needs a %s cgroup: %v", controller, err)
	}
	t.Cleanup(func() {
		_ = s.cmd.Process.Kill()
		_ = s.cmd.Wait()
		assert.Eventually(t, func() bool { return os.Remove(path) == nil }, 5*time.Second, 20*time.Millisecond)
	})
	return path, v2
}

// counter reads a number out of a file, of the line that begins with name where
// there are several.
func counter(t *testing.T, file, name string) (n int64) {
	t.Helper()
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	rest := string(b)
	if name != "" {
		var found bool
		_, rest, found = strings.Cut(rest, name+" ")
		require.True(t, found, "%s has no %s", file, name)
	}
	_, err = fmt.Sscan(rest, &n)
	require.NoError(t, err)
	return n
}

// A group at its limit must give up pages before it gets more: the fault that asks
// for one does that itself. They are clean ones, since a group whose disk does not
// keep up with what it dirties is killed.
func TestAGroupAtItsLimitIsReclaim(t *testing.T) {
	requireRoot(t)
	for _, shape := range []string{"thread per connection", "event loop"} {
		t.Run(shape, func(t *testing.T) {
			s := startC(t, shape == "event loop")
			group, v2 := cgroup(t, "memory", s)
			limit, met := "memory.limit_in_bytes", func() int64 { return counter(t, group+"/memory.failcnt", "") }
			if v2 {
				limit, met = "memory.max", func() int64 { return counter(t, group+"/memory.events", "\nmax") }
			}
			write := func(name, value string) { require.NoError(t, os.WriteFile(group+"/"+name, []byte(value), 0o644)) }
			write(limit, strconv.Itoa(8<<20))
			var cfg probe.Config
			if emulated() {
				cfg.MinDuration = 50 * time.Millisecond // else there are more occurrences than a request may have
			}
			w := observe(t, cfg, s)
			s.get("/")
			s.evict()
			s.get("/map")
			r := &w.wait(2)[1]
			requireWhole(t, r)
			assert.Zero(t, r.Exclusive[stage.Reclaim], "there is no limit yet: "+describe(r))

			s.evict() // what is charged to others is not this group's to reclaim
			write("cgroup.procs", strconv.FormatUint(uint64(s.pid()), 10))
			s.get("/map")
			require.Positive(t, met(), "the limit was never met")
			r = &w.wait(3)[2]
			requireWhole(t, r)
			t.Log(describe(r))
			assert.Positive(t, r.Exclusive[stage.Reclaim], describe(r))
			assert.Positive(t, r.Exclusive[stage.PageFault], describe(r))
		})
	}
}

// The same code as in an allocation, asked for by a system call, so that it
// happens whether memory is fragmented or not.
func TestCompactionInTheThreadIsCompaction(t *testing.T) {
	requireRoot(t)
	if _, err := os.Stat("/proc/sys/vm/compact_memory"); err != nil {
		t.Skip("needs CONFIG_COMPACTION: ", err)
	}
	s := startC(t, false)
	w := observe(t, probe.Config{}, s)
	s.get("/")
	before := counter(t, "/proc/vmstat", "compact_free_scanned")
	s.get("/compact")
	require.Greater(t, counter(t, "/proc/vmstat", "compact_free_scanned"), before, "nothing was compacted")
	r := &w.wait(2)[1]
	requireWhole(t, r)
	t.Log(describe(r))
	assert.Equal(t, "compaction", top(r, stage.Compaction).String(), describe(r))
	assert.Less(t, r.Exclusive[stage.Syscall], r.Exclusive[stage.Compaction], "what it waits for in compaction is compaction's: "+describe(r))
	var found []assemble.Occurrence
	for _, o := range w.of(r) {
		if o.Stage == stage.Compaction {
			found = append(found, o)
			assert.EqualValues(t, 1, o.Syscall, "write(2)")
		}
	}
	if r.Exclusive[stage.Compaction] > 20*ms {
		assert.NotEmpty(t, found)
	}
}
