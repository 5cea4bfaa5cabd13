package servers

import (
	"context"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/ebpfllm/ebpfllm/internal/truthlab/lab"
)

// start starts a server for a test, or skips it where something is missing.
func start(t *testing.T, server lab.Server) *lab.Rig {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: servers are given precedence over other processes")
	}
	for name, needs := range map[string]func() error{
		"uvicorn": func() error { _, err := findPython(t.Context(), "import uvicorn, starlette"); return err },
		"node":    func() error { _, err := exec.LookPath("node"); return err },
	} {
		if err := needs(); server.Name == name && err != nil {
			t.Skipf("needs %s: apt-get install python3-uvicorn python3-starlette nodejs (%v)", name, err)
		}
	}
	rig := &lab.Rig{Dir: t.TempDir(), Paths: map[string]string{}}
	rig.Dial = func(ctx context.Context) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "tcp", rig.Addr)
	}
	t.Cleanup(func() {
		for _, pid := range rig.PIDs {
			_ = unix.Kill(pid, unix.SIGKILL) // an engine may have ended with its API
		}
	})
	require.NoError(t, server.Start(t.Context(), rig))
	return rig
}

// ask returns how long an answer took, and how long the server says its fault took.
func ask(t *testing.T, rig *lab.Rig, path string) (took, said time.Duration) {
	t.Helper()
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 20 * time.Second}
	begin := time.Now()
	res, err := client.Get("http://" + rig.Addr + path)
	require.NoError(t, err, path)
	defer res.Body.Close()
	_, err = io.Copy(io.Discard, res.Body)
	require.NoError(t, err, path)
	took = time.Since(begin)
	require.Equal(t, http.StatusOK, res.StatusCode, path)
	if v := res.Header.Get("Fault-Nanoseconds"); v != "" {
		ns, err := strconv.ParseInt(v, 10, 64)
		require.NoError(t, err, path)
		said = time.Duration(ns)
	}
	return took, said
}

func TestServersAreDelayedByTheirPaths(t *testing.T) {
	python := []string{"/cpu?30", "/sleep?30", "/block?30", "/lock?30", "/mutex?30", "/pipe?30", "/collect?30", "/tokenise?30", "/thread/lock?30"}
	here := []string{"/cpu?30", "/sleep?30", "/lock?30", "/pipe?30", "/counter?30", "/team4?30", "/steal?30"}
	for _, test := range []struct {
		server  lab.Server
		delayed []string // by 30 ms at least
		streams []string // as well, but in a stream, whose head is sent before
		others  []string // are answered
	}{
		{Go(4), []string{"/cpu?30", "/sleep?30", "/flock?30", "/mutex?30", "/pipe?30", "/gc?30", "/accept?30"}, nil, []string{"/", "/none", "/read?1", "/map?10", "/touch?1", "/big?10"}},
		{Asyncio(), python, nil, []string{"/", "/read?1", "/map?10", "/touch?1", "/big?10", "/thread/read?1"}},
		{Uvicorn(), python, []string{"/batched?30"}, []string{"/", "/read?1", "/map?10", "/touch?1", "/big?10"}},
		{Node(), []string{"/cpu?30", "/sleep?30", "/block?30", "/pipe?30", "/pipe?30", "/collect?30"}, nil, []string{"/", "/read?1", "/async/read?1", "/touch?1", "/append?1", "/code?1", "/big?10"}},
		{AsyncioEngine(), python, []string{"/engine/cpu?30", "/engine/sleep?30", "/engine/lock?30", "/engine/tokenise?30"}, []string{"/engine/none", "/engine/map?10"}},
		{Engine(Loop, Unix), here, []string{"/engine/cpu?30", "/engine/sleep?30", "/engine/lock?30", "/engine/steal?30", "/engine/pace?30"}, []string{"/", "/engine/none", "/engine/map?10", "/search?10", "/scan?1", "/huge?2", "/anon?1"}},
		{Engine(Loop, SharedMemory), here, []string{"/engine/cpu?30", "/engine/sleep?30", "/engine/lock?30", "/engine/steal?30", "/engine/pace?30"}, []string{"/engine/none", "/engine/map?10"}},
		{Engine(Threads, Unix), here, []string{"/engine/cpu?30", "/engine/sleep?30", "/engine/lock?30", "/engine/steal?30", "/engine/pace?30"}, []string{"/engine/none", "/engine/map?10"}},
		{Engine(Threads, SharedMemory), here, []string{"/engine/cpu?30", "/engine/sleep?30", "/engine/lock?30", "/engine/steal?30", "/engine/pace?30"}, []string{"/engine/none", "/engine/map?10"}},
	} {
		t.Run(test.server.Name, func(t *testing.T) {
			rig := start(t, test.server)
			const delay = 30 * time.Millisecond
			const early = time.Millisecond // by which timers of milliseconds may be
			for _, path := range test.delayed {
				took, said := ask(t, rig, path)
				assert.GreaterOrEqual(t, said, delay-early, path)
				assert.GreaterOrEqual(t, took, said, path)
			}
			for _, path := range test.streams {
				took, _ := ask(t, rig, path)
				assert.GreaterOrEqual(t, took, delay-early, path)
			}
			for _, path := range test.others {
				ask(t, rig, path)
			}
		})
	}
}

func TestAnEngineIsAProcessOfItsOwnAndEndsWithItsAPI(t *testing.T) {
	for _, server := range []lab.Server{Engine(Loop, SharedMemory), AsyncioEngine()} {
		t.Run(server.Name, func(t *testing.T) {
			rig := start(t, server)
			require.Len(t, rig.PIDs, 2)
			engine := "/proc/" + strconv.Itoa(rig.PIDs[1])
			require.DirExists(t, engine)
			require.NoError(t, unix.Kill(rig.PIDs[0], unix.SIGKILL))
			assert.Eventually(t, func() bool { _, err := os.Stat(engine + "/exe"); return err != nil }, 10*time.Second, 10*time.Millisecond)
		})
	}
}

func TestWritesAreHeldFromOthers(t *testing.T) {
	path := t.TempDir() + "/log"
	require.NoError(t, os.WriteFile(path, []byte("first\n"), 0o600))
	rig := &lab.Rig{Dir: t.TempDir()}
	hold, err := HoldWrites(t.Context(), rig, path)
	require.NoError(t, err)
	for range 2 {
		const length = 50 * time.Millisecond
		begin := time.Now()
		require.NoError(t, hold(length))
		file, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
		require.NoError(t, err)
		_, err = file.WriteString("x\n")
		require.NoError(t, err)
		require.NoError(t, file.Close())
		assert.GreaterOrEqual(t, time.Since(begin), length, "the write waited for the other")
	}
}

func TestWhatIsMissingIsSaidWithItsRemedy(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	rig := &lab.Rig{Dir: t.TempDir(), Paths: map[string]string{}}
	assert.ErrorContains(t, Node().Start(t.Context(), rig), "apt-get install nodejs")
}
