package process

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestAProcessIsEndedWithItsGroup(t *testing.T) {
	cpu, _, err := SplitCPUs()
	if err != nil {
		t.Skip(err)
	}
	p, err := Start("a shell", filepath.Join(t.TempDir(), "log"), []int{cpu}, nil, "/bin/sh", "-c", "sleep 300 & sleep 300; :")
	require.NoError(t, err)
	var all []int
	require.Eventually(t, func() bool {
		all, err = p.Group()
		return err != nil || len(all) == 3
	}, 10*time.Second, time.Millisecond, "the shell and its two children")
	require.NoError(t, err)
	assert.Contains(t, all, p.PID())
	assert.NotContains(t, all, os.Getpid())
	p.Abandon()
	require.Error(t, p.Err(), "killed")
	require.Eventually(t, func() bool {
		all, err = p.Group()
		return err != nil || len(all) == 0
	}, 10*time.Second, time.Millisecond)
	require.NoError(t, err)
}

func TestASessionGetsItsNiceValueBack(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: only root may raise its precedence")
	}
	cpu, _, err := SplitCPUs()
	if err != nil {
		t.Skip(err)
	}
	p, err := StartApart("sleep", filepath.Join(t.TempDir(), "log"), []int{cpu}, nil, "/bin/sleep", "300")
	require.NoError(t, err)
	defer p.Abandon()
	nice := func() string {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/autogroup", p.PID()))
		if err != nil {
			t.Skipf("this kernel has no nice values of sessions: %v", err)
		}
		_, value, _ := strings.Cut(strings.TrimSpace(string(text)), " nice ")
		return value
	}
	require.Equal(t, "0", nice())
	restore, err := KeepSession(p.PID())
	require.NoError(t, err)
	require.NoError(t, Favour(p.PID(), cpu))
	require.Equal(t, "-20", nice())
	require.NoError(t, restore())
	assert.Equal(t, "0", nice())
}
