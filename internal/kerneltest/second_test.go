//go:build linux && amd64

package kerneltest

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A second eBPF tool at the same hooks, on the same server.

// switchesOf is how often a thread has left a CPU, by the kernel's own count.
func switchesOf(t *testing.T, tid uint32) (n int64) {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/status", tid, tid))
	require.NoError(t, err)
	for line := range strings.Lines(string(status)) {
		name, value, _ := strings.Cut(line, ":")
		if strings.HasSuffix(name, "_ctxt_switches") {
			k, err := strconv.ParseInt(strings.TrimSpace(value), 10, 64)
			require.NoError(t, err)
			n += k
		}
	}
	return n
}

func TestBesideBpftraceBothAreRight(t *testing.T) {
	requireRoot(t)
	bpftrace, err := exec.LookPath("bpftrace")
	if err != nil {
		t.Skip("needs bpftrace (apt-get install bpftrace)")
	}
	s := startCIn(t)
	s.asleep()
	before := switchesOf(t, s.pid())
	// the switches of the thread that accepts, the server's connections and its faults;
	// what it prints shows that all of this is attached
	script := fmt.Sprintf(`
		tracepoint:sched:sched_switch /args->prev_pid == %d/ { @switches = count(); }
		tracepoint:sched:sched_switch { @all = count(); }
		tracepoint:sched:sched_waking { @waking = count(); }
		tracepoint:sock:inet_sock_set_state /args->oldstate == 3 && args->newstate == 1 && args->sport == %d/ { @connections = count(); }
		software:page-faults:1 /pid == %d/ { @faults = count(); }
		interval:ms:100 { printf("attached\n"); }`, s.pid(), s.port, s.pid())
	trace := exec.Command(bpftrace, "-e", script)
	var said bytes.Buffer
	trace.Stderr = &said
	pipe, err := trace.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, trace.Start())
	defer func() {
		_ = trace.Process.Kill()
		_ = trace.Wait()
	}()
	out := bufio.NewScanner(pipe)
	for out.Scan() && out.Text() != "attached" {
	}
	if out.Text() != "attached" {
		_ = trace.Wait()
		require.FailNow(t, "bpftrace cannot attach", "%s", said.String())
	}

	c := collect(t, targetC(t))
	const n = 30
	for range n {
		s.ask("/lock?10", traceparent)
	}
	requests := c.to("/lock", n)
	s.asleep()
	after := switchesOf(t, s.pid())
	require.NoError(t, trace.Process.Signal(os.Interrupt))
	counts := map[string]int64{}
	count := regexp.MustCompile(`^@(\w+): (\d+)$`)
	for out.Scan() {
		if m := count.FindStringSubmatch(out.Text()); m != nil {
			counts[m[1]], err = strconv.ParseInt(m[2], 10, 64)
			require.NoError(t, err)
		}
	}
	require.NoError(t, trace.Wait())

	assert.Equal(t, int64(n), counts["connections"], "%v", counts)
	assert.Equal(t, after-before, counts["switches"], "%v", counts)
	assert.Positive(t, counts["faults"], "%v", counts)
	assert.Greater(t, counts["all"], counts["switches"])
	for i := range requests {
		requireLinked(t, &requests[i])
		assert.Greater(t, requests[i].stage(t, "lock"), tolerance*0.01)
	}
	c.requireAccount()
}

func TestTwoReceiversOnOneServerAgree(t *testing.T) {
	requireRoot(t)
	s := startCIn(t)
	c := collect(t, targetC(t))
	p := collectElsewhere(t, targetC(t).Executable)
	const n = 10
	for range n {
		s.ask("/lock?20", traceparent)
	}
	ours := c.to("/lock", n)
	theirs := p.finish(t)
	require.Len(t, theirs, n)
	for i := range ours {
		for _, r := range []*request{&ours[i], &theirs[i]} {
			requireLinked(t, r)
			assert.Greater(t, r.stage(t, "lock"), tolerance*0.02)
		}
		// each takes the time for itself, a moment apart
		assert.WithinDuration(t, ours[i].Start, theirs[i].Start, 5*time.Millisecond)
		assert.InDelta(t, ours[i].stage(t, "lock"), theirs[i].stage(t, "lock"), 0.005)
		assert.Equal(t, ours[i].Attributes["client.port"], int64(theirs[i].Attributes["client.port"].(float64)))
	}
	// the other has taken nothing of this one's with it
	s.ask("/lock?20", traceparent)
	r := &c.to("/lock", n+1)[n]
	requireLinked(t, r)
	assert.Greater(t, r.stage(t, "lock"), tolerance*0.02)
	c.requireAccount()
}
