package scenarios

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ebpfllm/ebpfllm/internal/truthlab/lab"
)

func TestAnOwnCaseThatCannotBeIsRefused(t *testing.T) {
	for want, o := range map[string]CommandOptions{
		"it must be one of": {Stage: "locks", Fault: "true"},
		"either -fault-cmd": {Stage: "lock"},
		"or -slow":          {Stage: "lock", Fault: "true", Slow: "/a"},
	} {
		_, err := Command(o)
		assert.ErrorContains(t, err, want)
	}
}

func TestAFaultCommandIsEndedWithItsChildren(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root, as the lab does: a session of its own has another nice value")
	}
	const length = 20 * time.Millisecond
	for name, c := range map[string]struct {
		command string
		cancel  time.Duration
		fails   string
	}{
		"it ends":                {command: "sleep 0.02", cancel: time.Minute},
		"it fails":               {command: "echo because; exit 3", cancel: time.Minute, fails: "exit status 3: because"},
		"it does not end":        {command: "sleep 300", cancel: time.Minute, fails: "still ran after 2.2s, and has to end after $FAULT_MS, which is 20: sleep 300"},
		"a child of it goes on":  {command: "sleep 300 & echo $! >CHILD", cancel: time.Minute},
		"the lab is interrupted": {command: "sleep 300 & echo $! >CHILD; sleep 300", cancel: 200 * time.Millisecond, fails: "deadline exceeded"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			child := filepath.Join(dir, "child")
			ctx, cancel := context.WithTimeout(t.Context(), c.cancel)
			defer cancel()
			rig := &lab.Rig{Dir: dir, Others: []int{0}}
			err := disturbBy(ctx, rig, length, strings.ReplaceAll(c.command, "CHILD", child))
			if c.fails == "" {
				require.NoError(t, err)
			} else {
				require.ErrorContains(t, err, c.fails)
			}
			if strings.Contains(c.command, "CHILD") {
				pid, err := os.ReadFile(child)
				require.NoError(t, err)
				assert.Eventually(t, func() bool {
					text, err := os.ReadFile("/proc/" + strings.TrimSpace(string(pid)) + "/stat")
					return err != nil || strings.Contains(string(text), ") Z ")
				}, 10*time.Second, time.Millisecond)
			}
		})
	}
}

func TestAFaultCommandHasNothingOfTheLabsPrecedence(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: only root may raise its precedence")
	}
	dir := t.TempDir()
	out := filepath.Join(dir, "nice")
	rig := &lab.Rig{Dir: dir, Others: []int{0}, CPU: 1, PIDs: []int{11, 12}, Addr: "127.0.0.1:1"}
	require.NoError(t, disturbBy(t.Context(), rig, 60*time.Millisecond, "{ nice; echo $FAULT_MS $SERVER_CPU $SERVER_PIDS $SERVER_ADDR; } >"+out))
	text, err := os.ReadFile(out)
	require.NoError(t, err)
	assert.Equal(t, "0\n60 1 11 12 127.0.0.1:1\n", string(text))
}
