/* torch believes in this many GPUs; preloaded, since it asks c10::cuda in C++ */
int fake_devices = 0;
signed char _ZN3c104cuda12device_countEv(void) { return (signed char)fake_devices; }
signed char _ZN3c104cuda28device_count_ensure_non_zeroEv(void) { return 1; }
