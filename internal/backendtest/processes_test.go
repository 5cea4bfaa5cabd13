//go:build backends

package backendtest

import (
	"context"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// program is a running back end, collector or server.
type program struct {
	name   string
	cmd    *exec.Cmd
	ended  chan struct{}
	result error // of a program that has ended
}

// start runs a program until the test ends, then asks it to stop and waits. The
// end of its output is shown if the test failed.
func start(t *testing.T, name, path string, env []string, args ...string) *program {
	t.Helper()
	output, err := os.Create(filepath.Join(t.TempDir(), name+".log"))
	require.NoError(t, err)
	cmd := exec.Command(path, args...)
	cmd.Stdout, cmd.Stderr = output, output
	cmd.Env = append(os.Environ(), env...)
	// Nothing may outlive a test that was killed.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	require.NoError(t, cmd.Start())
	p := &program{name: name, cmd: cmd, ended: make(chan struct{})}
	go func() {
		p.result = cmd.Wait()
		close(p.ended)
	}()

	t.Cleanup(func() {
		defer output.Close()
		cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-p.ended:
			assert.NoError(t, p.result, "%s did not end well", name)
		case <-time.After(20 * time.Second):
			cmd.Process.Kill()
			assert.Fail(t, name+" did not stop on SIGTERM within 20 s")
		}
		if t.Failed() {
			text, _ := os.ReadFile(output.Name())
			t.Logf("%s said:\n%s", name, text[max(0, len(text)-5000):])
		}
	})
	return p
}

// signal sends a signal to the program.
func (p *program) signal(t *testing.T, s os.Signal) {
	t.Helper()
	require.NoError(t, p.cmd.Process.Signal(s))
}

// stop asks the program to stop, and waits until it has.
func (p *program) stop(t *testing.T) {
	t.Helper()
	p.signal(t, syscall.SIGTERM)
	select {
	case <-p.ended:
		require.NoError(t, p.result, "%s did not end well", p.name)
	case <-time.After(20 * time.Second):
		require.FailNow(t, p.name+" did not stop on SIGTERM within 20 s")
	}
}

// answers waits until the program answers 200 on an address.
func (p *program) answers(t *testing.T, address string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, address, http.NoBody)
		require.NoError(t, err)
		response, err := http.DefaultClient.Do(request)
		if err == nil {
			response.Body.Close()
			if response.StatusCode == http.StatusOK {
				return
			}
		}
		select {
		case <-p.ended:
			require.FailNow(t, p.name+" ended", "%v", p.result)
		case <-ctx.Done():
			require.FailNow(t, p.name+" does not answer on "+address, "%v", err)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// freeAddr returns an address on loopback that nobody listens on.
func freeAddr(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer listener.Close()
	return listener.Addr().String()
}

// backend returns the path of a back end that `make test-backends` built.
func backend(t *testing.T, name string) string {
	t.Helper()
	dir := os.Getenv("EBPFLLM_BACKENDS")
	require.NotEmpty(t, dir, "EBPFLLM_BACKENDS names no folder; run 'make test-backends'")
	path := filepath.Join(dir, name)
	require.FileExists(t, path, "run 'make test-backends', which builds it")
	return path
}

func collector(t *testing.T) string {
	t.Helper()
	path := os.Getenv("EBPFLLM_COLLECTOR")
	require.NotEmpty(t, path, "EBPFLLM_COLLECTOR names no file; run 'make test-backends'")
	require.FileExists(t, path, "run 'make build'")
	return path
}

func buildServer(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "llmserver")
	out, err := exec.Command("go", "build", "-o", path, "../../examples/llmserver").CombinedOutput()
	require.NoError(t, err, string(out))
	return path
}
