package scenarios

import "github.com/ebpfllm/ebpfllm/internal/truthlab/lab"

func network() []lab.Scenario { return nil }
